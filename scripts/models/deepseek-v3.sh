# deepseek-ai/DeepSeek-V3 (deepseek_v3), without its layer for multi-token prediction
MODEL_ARGS=(
   --num-layers 61
   --hidden-size 7168
   --ffn-hidden-size 18432
   --swiglu
   --vocab-size 129280
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   # latent attention
   --multi-latent-attention
   --num-attention-heads 128
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --qk-layernorm
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   # rotary embedding
   --use-rotary-position-embeddings
   --rotary-base 10000
   --rope-type yarn
   --rotary-scaling-factor 40.0
   --mscale 1.0
   --mscale-all-dim 1.0
   # experts
   --num-experts 256
   --moe-layer-freq "([0]*3+[1]*58)"
   --moe-router-topk 8
   --moe-ffn-hidden-size 2048
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid
   --moe-router-enable-expert-bias
   --moe-router-num-groups 8
   --moe-router-group-topk 4
   --moe-router-topk-scaling-factor 2.5
)
