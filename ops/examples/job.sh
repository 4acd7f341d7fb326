#!/usr/bin/env bash
# Queue a job for Pagemill without a NATS library, leave, and fetch the answer later. NATS is a
# protocol of text lines; this program needs bash, jq and openssl.
#
# bash job.sh ask "What can you do?"          queues a question, and prints the id of the job
# bash job.sh paint "a red circle on blue"    queues an image, and prints the id of the job
# bash job.sh read ID                         prints the answer to a question
# bash job.sh save ID FILE                    writes an image to a file
set -euo pipefail
export LC_ALL=C # Lengths are numbers of bytes.
key=${NATS_NKEY-data/nats/keys/tenants/local.nk}
address=${NATS_URL:-nats://127.0.0.1:4222}
address=${address#nats://}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
trap '' PIPE # A connection that the server has closed is an error of `printf`.

hex() { od -An -v -tx1 | tr -d ' \n'; }
bytes() { printf '%b' "$(sed 's/../\\x&/g' <<<"$1")"; }

# Print the checksum of the bytes $1, CRC-16 with the lower byte first, which ends a public key.
checksum() {
  local crc=0 i bit
  for ((i = 0; i < ${#1}; i += 2)); do
    ((crc ^= 0x${1:i:2} << 8)) || true
    for bit in 1 2 3 4 5 6 7 8; do
      ((crc = crc & 0x8000 ? (crc << 1 ^ 0x1021) & 0xffff : crc << 1)) || true
    done
  done
  printf '%02x%02x' $((crc & 255)) $((crc >> 8))
}

# Connect, and sign what the server sends with the key of a tenant. The server waits two seconds.
sign_in() {
  local line seed public nkey signature fields=''
  if [[ -n $key ]]; then
    seed=$(head -c 58 "$key" | sed 's/$/======/' | base32 -d | tail -c +3 | head -c 32 | hex)
    bytes "302e020100300506032b657004220420$seed" >"$folder/key"
    public=a0$(openssl pkey -inform DER -in "$folder/key" -pubout -outform DER | tail -c 32 | hex)
    nkey=$(bytes "$public$(checksum "$public")" | base32 -w0 | tr -d =)
  fi
  exec 3<>"/dev/tcp/${address%:*}/${address#*:}"
  read -r line <&3
  if [[ -n $key ]]; then
    [[ $line =~ \"nonce\":\"([^\"]*)\" ]]
    printf '%s' "${BASH_REMATCH[1]}" >"$folder/nonce"
    signature=$(openssl pkeyutl -sign -rawin -keyform DER -inkey "$folder/key" \
      -in "$folder/nonce" | base64 -w0)
    signature=${signature//+/-} signature=${signature//\//_} signature=${signature%%=*}
    fields=",\"nkey\":\"$nkey\",\"sig\":\"$signature\""
  fi
  printf 'CONNECT {"verbose":false%s}\r\n' "$fields" >&3
}

# Send $2 to the subject $1, and print the reply.
request() {
  local inbox=_INBOX.$RANDOM$RANDOM line
  printf 'SUB %s %s\r\nPUB %s %s %d\r\n%s\r\n' "$inbox" "$RANDOM" "$1" "$inbox" ${#2} "$2" >&3
  while read -r -t 10 line <&3; do
    line=${line%$'\r'}
    case $line in
      PING) printf 'PONG\r\n' >&3 ;;
      MSG*) head -c "${line##* }" <&3 && return ;;
      -ERR*) printf '%s\n' "$line" >&2 && return 1 ;;
    esac
  done
  printf 'no reply to %s\n' "$1" >&2 && return 1
}

# Write the reply to a request to the file `page`, or end with its error.
call() {
  request "$1" "$2" >"$folder/page"
  if jq -e .error "$folder/page" >/dev/null; then
    fail '.error | .message // .description'
  fi
}

fail() {
  jq -r "$1" "$folder/page" >&2
  exit 1
}

queue() {
  local job
  job=$(openssl rand -hex 16)
  # The acknowledgement of this publish means that the job is on the broker's disk.
  call "pm.request.demo.$job" "$1"
  printf '%s\n' "$job"
}

# Print all records of the output $2 of a job, and wait for those that are not there yet.
records() {
  local start=0 next ended=false failure='.records[] | select(.type == "error").error.message'
  while [[ $ended == false ]]; do
    call "pm.read.$1" "{\"from\": $start, \"output\": \"$2\"}"
    if jq -e "$failure" "$folder/page" >/dev/null; then fail "$failure"; fi
    jq -c '.records[]' "$folder/page"
    read -r next ended < <(jq -r '"\(.next) \(.ended)"' "$folder/page")
    if ((next == start)); then sleep 0.5; fi
    start=$next
  done
}

save() {
  local name start=0 ended=false
  records "$1" text >"$folder/text" # The last of these is the end of the job, or its error.
  records "$1" image >"$folder/image"
  name=$(jq -r 'select(.type == "image").media' "$folder/image")
  : >"$2"
  while [[ $ended == false ]]; do
    call "pm.file.${name#media:}" "{\"from\": $start}"
    jq -r .data "$folder/page" | base64 -d >>"$2"
    read -r start ended < <(jq -r '"\(.next) \(.ended)"' "$folder/page")
  done
}

sign_in
case ${1-} in
  ask) queue "$(jq -nc '{model: "demo", messages: [{role: "user", content: $ARGS.positional[0]}]}' --args "$2")" ;;
  paint) queue "$(jq -nc '{model: "demo", prompt: $ARGS.positional[0], outputs: ["image"]}' --args "$2")" ;;
  read) records "$2" text | jq -j '.choices[]?.text' && echo ;;
  save) save "$2" "$3" ;;
  *) sed -n 's/^# \(bash job.sh\)/\1/p' "$0" >&2 && exit 1 ;;
esac
