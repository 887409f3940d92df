#!/bin/bash
# As Megatron-LM's example for Mixtral: environment with defaults, comments between options, and a list that grows.
export EP=8
GPUS_PER_NODE=8
MASTER_ADDR=${MASTER_ADDR:-"localhost"}
NNODES=${SLURM_NNODES:-"4"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TOKENIZER_MODEL=$2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr $MASTER_ADDR
)
MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --swiglu
    --untie-embeddings-and-output-weights --vocab-size 32000
    --group-query-attention
    --num-query-groups 8
    --no-masked-softmax-fusion
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    # --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
TRAINING_ARGS="
    --micro-batch-size 1 \
    --global-batch-size=256 \
    --bf16
"
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 8
    --expert-model-parallel-size ${EP}   # of 32 ranks
    --use-distributed-optimizer --recompute-granularity selective
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
    )
fi
OVERLAP="--overlap-grad-reduce"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${MOE_ARGS[@]} --tokenizer-model ${TOKENIZER_MODEL} $TRAINING_ARGS $OVERLAP \
    ${MODEL_PARALLEL_ARGS[@]} ${LOGGING_ARGS[@]}
