#!/bin/sh
# Run the sections on a machine to which `python -m ops.gpu prepare` has sent the folders .whl and .gpu:
#   bash .gpu/device_run.sh                                   # in the root of the tree
#   ONLY="tests sanitizer" BUDGET=150 bash .gpu/device_run.sh  # some sections, in less time
# OUT is the folder of the results. Options of `python -m ops.gpu run` may follow.
exec "${PYTHON:-python3}" -m ops.gpu run --out "${OUT:-build/gpu}" \
  ${GPU_DRY:+--dry} ${ONLY:+--only "$ONLY"} ${BUDGET:+--budget "$BUDGET"} "$@"
