# What a developer types. The work is done by the programs of e2e/: `cluster`, `images`, `bench`.

export CARGO_TARGET_DIR ?= $(HOME)/.cache/ferrovirt/target
export REGISTRY ?=

CARGO ?= cargo
PREFIX ?= /usr/local
BIN := build/bin
RELEASE := $(CARGO_TARGET_DIR)/release
CLUSTER := $(RELEASE)/cluster
IMAGES := $(RELEASE)/images
# The name under which kubectl asks the plugin for completions.
COMPLETER := kubectl_complete-virt
# Two cores build one thing at a time fastest.
.NOTPARALLEL:

.PHONY: help
help: ## Lists the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: deps
deps: ## Installs what building needs on this machine (Debian, root), or tells what is missing
	@command -v cargo >/dev/null || { echo 'cargo is missing: Rust 1.95 or later from https://rustup.rs' >&2; exit 1; }
	@command -v go >/dev/null || { echo 'go is missing: Go 1.26 or later from https://go.dev/dl' >&2; exit 1; }
	@packages=; \
	command -v cc >/dev/null || packages="$$packages gcc libc6-dev"; \
	command -v pkg-config >/dev/null || packages="$$packages pkg-config"; \
	test -e /usr/include/libvirt/libvirt.h || packages="$$packages libvirt-dev"; \
	test -z "$$packages" || { echo "installing$$packages"; apt-get update -q && apt-get install -q -y --no-install-recommends $$packages; }

# What the test cluster is built from is fetched and compiled, once, beside the Rust compiler and behind it in priority: it takes what
# that leaves of the processors, two minutes and more of a first `make up`. What fails here is tried again, and told, by the build of the
# components, which `up` and `e2e` come to when this has ended.
COMPONENTS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ferrovirt/components
AWAIT_AHEAD := test ! -e build/ahead.lock || flock build/ahead.lock true
.PHONY: ahead
ahead: deps
	@test -n "$$KUBECONFIG" || test -d $(COMPONENTS) || { mkdir -p build; cd e2e/cluster/components; \
	CGO_ENABLED=0 flock ../../../build/ahead.lock nice -n 19 go list -trimpath -buildvcs=false -gcflags=all=-dwarf=false \
	-export -deps tool ./coredns ./etcd \
	</dev/null >../../../build/ahead.log 2>&1 & }

# The rest of what is needed is in a list of the `cluster` program (e2e/cluster/src/deps.rs), which tells what each part is for.
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
up: tiny ## Brings a cluster up (or uses that of KUBECONFIG), installs Ferrovirt, boots a machine
	$(CLUSTER) demo

# Where it was never built, or built and cleaned away.
$(CLUSTER):
	$(CARGO) build --release --locked --package ferrovirt-e2e-cluster --bins

.PHONY: down
down: $(CLUSTER) ## Removes the cluster and all it made
	$(CLUSTER) down

.PHONY: status
status: $(CLUSTER) ## Tells what runs
	$(CLUSTER) status

.PHONY: lint
lint: ## Format, clippy, and what is in the dependency tree where cargo-deny is installed
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny check bans licenses sources; else echo 'cargo-deny is not installed: skipped'; fi

.PHONY: unit
unit: ## Unit tests
	$(CARGO) test --workspace --exclude ferrovirt-e2e-tests --locked

# Chosen from the whole workspace: for one package alone cargo would compile its dependencies anew, with fewer features.
STORIES := --workspace --locked --test conformance --test e2e
# Looks at what all stories left in the audit log, so it comes after them.
AUDIT := --workspace --locked --test audit
.PHONY: e2e
e2e: images guests ## End-to-end tests, on the own cluster or on that of KUBECONFIG
	$(CARGO) test $(STORIES) --test audit --no-run
	@$(AWAIT_AHEAD)
	$(CLUSTER) run -- sh -c '$(CARGO) test $(STORIES) && $(CARGO) test $(AUDIT) -- --nocapture'

.PHONY: test
test: deps lint unit e2e ## Everything: lint, unit tests, cluster up, end-to-end tests, cluster down

.PHONY: test-long
test-long: export FLOOD_SECONDS = 120
test-long: test ## As test, with attacks that last as long as real ones

.PHONY: bench
bench: tiny ## Measures starts, memory and API calls; writes build/bench.json
	$(CLUSTER) run -- $(RELEASE)/bench

.PHONY: clients
clients: tiny ## Lets VNC clients of other people use a machine's display (see e2e/clients)
	$(CLUSTER) run -- e2e/clients/run.sh

.PHONY: push
push: ## Sends the images to REGISTRY=host/path with skopeo
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
