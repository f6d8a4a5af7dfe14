# Commands for developers. The programs `cluster`, `images` and `bench` do the work.

export CARGO_TARGET_DIR ?= $(HOME)/.cache/ferrovirt/target
export REGISTRY ?=

CARGO ?= cargo
PREFIX ?= /usr/local
BIN := build/bin
RELEASE := $(CARGO_TARGET_DIR)/release
CLUSTER := $(RELEASE)/cluster
IMAGES := $(RELEASE)/images
# Name of the program that kubectl runs for the plugin's completions.
COMPLETER := kubectl_complete-virt
# On two cores, one target at a time is fastest.
.NOTPARALLEL:

.PHONY: help
help: ## Lists the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: deps
deps: ## Installs the build dependencies on this host (Debian, root), or names those that are missing
	@command -v cargo >/dev/null || { echo 'cargo is missing: Rust 1.95 or later from https://rustup.rs' >&2; exit 1; }
	@command -v go >/dev/null || { echo 'go is missing: Go 1.26 or later from https://go.dev/dl' >&2; exit 1; }
	@packages=; \
	command -v cc >/dev/null || packages="$$packages gcc libc6-dev"; \
	command -v pkg-config >/dev/null || packages="$$packages pkg-config"; \
	test -e /usr/include/libvirt/libvirt.h || packages="$$packages libvirt-dev"; \
	command -v ip >/dev/null || packages="$$packages iproute2"; \
	command -v nft >/dev/null || packages="$$packages nftables"; \
	test -z "$$packages" || { echo "installing$$packages"; apt-get update -q && apt-get install -q -y --no-install-recommends $$packages; }

# Fetches and compiles the Go packages of the test cluster once, beside the Rust compiler and with lower priority. This saves two
# minutes and more of a first `make up`. `up` and `e2e` wait for it and build the components afterwards, which repeats and reports
# failures.
COMPONENTS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ferrovirt/components
AWAIT_AHEAD := test ! -e build/ahead.lock || flock build/ahead.lock true
.PHONY: ahead
ahead: deps
	@test -n "$$KUBECONFIG" || test -d $(COMPONENTS) || { mkdir -p build; cd e2e/cluster/components; \
	CGO_ENABLED=0 flock ../../../build/ahead.lock nice -n 19 go list -trimpath -buildvcs=false -gcflags=all=-dwarf=false \
	-export -deps tool ./coredns ./etcd \
	</dev/null >../../../build/ahead.log 2>&1 & }

# `cluster deps` installs further dependencies (e2e/cluster/src/deps.rs lists them with their purposes).
.PHONY: build
build: ahead ## Builds all programs (release profile) and puts those for users into build/bin
	$(CARGO) build --release --locked --workspace --bins
	install -D -t $(BIN) $(RELEASE)/kubectl-virt $(RELEASE)/cluster $(RELEASE)/images $(RELEASE)/bench
	@ln -sf kubectl-virt $(BIN)/$(COMPLETER)
	$(CLUSTER) deps

.PHONY: components
components: build ## Builds Kubernetes and the rest of the test cluster from their Go module, once
	@$(AWAIT_AHEAD)
	$(CLUSTER) build-components

.PHONY: images
images: build ## Builds the images of all processes into build/images
	$(IMAGES) build services

.PHONY: guests
guests: build ## Builds the images of all test guests into build/images
	$(IMAGES) build guests

.PHONY: tiny
tiny: images
	$(IMAGES) build guest-tiny guest-tiny-kernel
	@$(AWAIT_AHEAD)

.PHONY: up
up: tiny ## Brings a cluster up (or uses that of KUBECONFIG), installs Ferrovirt and starts a VM
	$(CLUSTER) demo

# If it was not built, or cleaned.
$(CLUSTER):
	$(CARGO) build --release --locked --package ferrovirt-e2e-cluster --bins

.PHONY: down
down: $(CLUSTER) ## Removes the cluster and everything it created
	$(CLUSTER) down

.PHONY: status
status: $(CLUSTER) ## Shows the status of the cluster
	$(CLUSTER) status

.PHONY: lint
lint: ## Checks format, clippy, and the dependency tree if cargo-deny is installed
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny check bans licenses sources; else echo 'cargo-deny is not installed: skipped'; fi

.PHONY: docs
docs: ## Renews the generated parts of the documents
	RENEW=1 $(CARGO) test --locked -p ferrovirt-layout

.PHONY: unit
unit: ## Runs unit tests
	$(CARGO) test --workspace --exclude ferrovirt-e2e-tests --locked

# Selected from the workspace: for a single package cargo would rebuild dependencies with fewer features.
STORIES := --workspace --locked --test conformance --test e2e
# Reads the audit log of all stories, so it runs after them.
AUDIT := --workspace --locked --test audit
.PHONY: e2e
e2e: images guests ## Runs end-to-end tests on the test cluster or on that of KUBECONFIG
	$(CARGO) test $(STORIES) --test audit --no-run
	@$(AWAIT_AHEAD)
	$(CLUSTER) run -- sh -c '$(CARGO) test $(STORIES) && $(CARGO) test $(AUDIT) -- --nocapture'

.PHONY: test
test: deps lint unit e2e ## Runs everything: lint, unit tests, cluster up, end-to-end tests, cluster down

.PHONY: test-long
test-long: export FLOOD_SECONDS = 120
test-long: test ## Runs test with attacks of realistic duration

.PHONY: bench
bench: tiny ## Measures starts, memory and API calls; writes build/bench.json
	$(CLUSTER) run -- $(RELEASE)/bench

.PHONY: bench-scale
bench-scale: tiny ## Measures thousands of VMIs on simulated nodes (about 30 minutes); writes build/bench-scale.json
	kwok=$$($(CLUSTER) build-kwok) && $(CLUSTER) run -- $(RELEASE)/bench --scale "$$kwok"

.PHONY: clients
clients: tiny ## Tests the display with VNC clients of other projects (see e2e/clients)
	$(CLUSTER) run -- e2e/clients/run.sh

.PHONY: push
push: ## Pushes the images to REGISTRY=host/path with skopeo
	@test -n "$(REGISTRY)" || { echo 'REGISTRY=host/path is not set' >&2; exit 1; }
	$(IMAGES) push --registry $(REGISTRY) $(PUSH_FLAGS)

.PHONY: install-cli
install-cli: build ## Installs the kubectl plugin into PREFIX/bin (/usr/local)
	install -D -t $(PREFIX)/bin $(BIN)/kubectl-virt
	ln -sf kubectl-virt $(PREFIX)/bin/$(COMPLETER)

.PHONY: clean
clean: ## Removes the cluster and build/; compiled crates and components stay in the cache
	@if [ -x $(CLUSTER) ]; then $(CLUSTER) down; fi
	rm -rf build
