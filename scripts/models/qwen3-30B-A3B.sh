# Qwen/Qwen3-30B-A3B (qwen3_moe)
MODEL_ARGS=(
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 6144
   --swiglu
   --vocab-size 151936
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   # attention heads
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 4
   --kv-channels 128
   --qk-layernorm
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 1000000
   # experts
   --num-experts 128
   --moe-router-topk 8
   --moe-ffn-hidden-size 768
)
