#!/bin/sh
# From a model to a published checkpoint with its evidence. After a failure run it again: quantize goes on where it
# stopped, and publish does not send again what has arrived.
#
#   MODEL=Qwen/Qwen3.5-27B REPO=me/Qwen3.5-27B-W4A16 ./publish.sh [options of sparkquant publish]
#
# RECIPE  a shipped recipe or a file; without it the model's own recipe, or the default
# OUT     the folder of the result (the name of REPO)
# ROWS, TOKENS   at most so many evaluation rows, cut to so many tokens (all of them, whole)
# VLLM    where vLLM is installed, on a machine with a GPU; without it pass --allow-missing validate
set -eu
: "${MODEL:?a hub id or a folder}" "${REPO:?owner/name on the hub}"
OUT=${OUT:-${REPO##*/}}

[ -d "$OUT" ] || sparkquant quantize "$MODEL" ${RECIPE:+-r "$RECIPE"} -o "$OUT"
sparkquant verify "$OUT" --source "$MODEL" --deep
sparkquant evaluate "$OUT" --source "$MODEL" ${ROWS:+--rows "$ROWS"} ${TOKENS:+--tokens "$TOKENS"}
if [ -n "${VLLM:-}" ]; then
  sparkquant validate "$OUT" --reference "$MODEL" --vllm "$VLLM"
fi
sparkquant publish "$OUT" "$REPO" "$@"
