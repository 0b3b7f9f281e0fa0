# meta-llama/Llama-3.2-1B (llama)
MODEL_ARGS=(
   --num-layers 16
   --hidden-size 2048
   --ffn-hidden-size 8192
   --swiglu
   --vocab-size 128256
   --disable-bias-linear
   # attention heads
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 64
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-5
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 500000
   --use-rope-scaling
   --rope-scaling-factor 32.0
)
