# meta-llama/Llama-3.1-8B (llama)
MODEL_ARGS=(
   --num-layers 32
   --hidden-size 4096
   --ffn-hidden-size 14336
   --swiglu
   --vocab-size 128256
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   # attention heads
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-5
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 500000
   --use-rope-scaling
   --rope-scaling-factor 8.0
)
