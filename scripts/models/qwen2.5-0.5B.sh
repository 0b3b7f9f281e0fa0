# Qwen/Qwen2.5-0.5B (qwen2)
MODEL_ARGS=(
   --num-layers 24
   --hidden-size 896
   --ffn-hidden-size 4864
   --swiglu
   --vocab-size 151936
   --disable-bias-linear
   --add-qkv-bias
   # attention heads
   --num-attention-heads 14
   --group-query-attention
   --num-query-groups 2
   --kv-channels 64
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
