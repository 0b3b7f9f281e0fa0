# Qwen/Qwen3-0.6B (qwen3)
MODEL_ARGS=(
   --num-layers 28
   --hidden-size 1024
   --ffn-hidden-size 3072
   --swiglu
   --vocab-size 151936
   --disable-bias-linear
   # attention heads
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
