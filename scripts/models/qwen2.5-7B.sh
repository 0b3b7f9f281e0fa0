# Qwen/Qwen2.5-7B (qwen2)
MODEL_ARGS=(
   --num-layers 28
   --hidden-size 3584
   --ffn-hidden-size 18944
   --swiglu
   --vocab-size 152064
   --disable-bias-linear
   --add-qkv-bias
   --untie-embeddings-and-output-weights
   # attention heads
   --num-attention-heads 28
   --group-query-attention
   --num-query-groups 4
   --kv-channels 128
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
