# Qwen/Qwen3-8B (qwen3)
MODEL_ARGS=(
   --num-layers 36
   --hidden-size 4096
   --ffn-hidden-size 12288
   --swiglu
   --vocab-size 151936
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   # attention heads
   --num-attention-heads 32
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
