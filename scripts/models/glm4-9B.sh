# THUDM/glm-4-9b-hf (glm)
MODEL_ARGS=(
   --num-layers 40
   --hidden-size 4096
   --ffn-hidden-size 13696
   --swiglu
   --vocab-size 151552
   --disable-bias-linear
   --add-qkv-bias
   --untie-embeddings-and-output-weights
   # attention heads
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1.5625e-07
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 10000
   --rotary-percent 0.5
   --rotary-interleaved
)
