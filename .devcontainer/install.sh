#!/usr/bin/env bash
# Prepares an empty Debian for `make course`; a codespace runs this once, when it is created.
set -euo pipefail
cd "$(dirname "$0")/.."

apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
  git make g++ python3-venv python3-dev ca-certificates
# The checkout may belong to another user, outside the container.
git config --global --add safe.directory "$PWD"

# In a codespace the browser's address is not the server's, and the server refuses foreign origins.
if [ -n "${CODESPACE_NAME:-}" ]; then
  domain=${GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN:-app.github.dev}
  mkdir -p ~/.jupyter
  printf '{"ServerApp": {"allow_origin_pat": "^https://%s-[0-9]+[.]%s$"}}\n' \
    "$CODESPACE_NAME" "${domain//./[.]}" > ~/.jupyter/jupyter_server_config.json
fi

make setup
