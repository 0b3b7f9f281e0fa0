# Qwen/Qwen2.5-32B (qwen2); its Instruct version has --norm-epsilon 1e-6
MODEL_ARGS=(
   --num-layers 64
   --hidden-size 5120
   --ffn-hidden-size 27648
   --swiglu
   --vocab-size 152064
   --disable-bias-linear
   --add-qkv-bias
   --untie-embeddings-and-output-weights
   # attention heads
   --num-attention-heads 40
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-5
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
