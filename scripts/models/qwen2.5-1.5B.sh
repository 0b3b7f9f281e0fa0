# Qwen/Qwen2.5-1.5B (qwen2)
MODEL_ARGS=(
   --num-layers 28
   --hidden-size 1536
   --ffn-hidden-size 8960
   --swiglu
   --vocab-size 151936
   --disable-bias-linear
   --add-qkv-bias
   # attention heads
   --num-attention-heads 12
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
