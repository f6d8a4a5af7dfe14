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
# Cargo compares the age of a clone's files with that of the last build, even if another clone has made it.
LAST_CLONE := $(CARGO_TARGET_DIR)/clone
ifneq ($(file <$(LAST_CLONE)),$(CURDIR))
$(shell git ls-files -z | xargs -0r touch -c && mkdir -p $(CARGO_TARGET_DIR) && echo $(CURDIR) >$(LAST_CLONE))
endif
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
# COMPILE_FLAGS of e2e/cluster/src/components.rs.
GO_FLAGS := '-gcflags=all=-dwarf=false' '-gcflags=k8s.io/kubernetes/...=-dwarf=false -l' \
	'-gcflags=k8s.io/kubectl/...=-dwarf=false -l' \
	'-gcflags=k8s.io/client-go/applyconfigurations/...=-dwarf=false -l' \
	'-gcflags=k8s.io/client-go/informers/...=-dwarf=false -l' \
	'-gcflags=helm.sh/helm/...=-dwarf=false -l'
AWAIT_AHEAD := test ! -e build/ahead.lock || flock build/ahead.lock true
.PHONY: ahead
ahead: deps
	@test -n "$$KUBECONFIG$(NO_CLUSTER)" || test -d $(COMPONENTS) || { mkdir -p build; cd e2e/cluster/components; \
	CGO_ENABLED=0 flock ../../../build/ahead.lock nice -n 19 go list -trimpath -buildvcs=false $(GO_FLAGS) \
	-export -deps tool ./coredns ./etcd \
	</dev/null >../../../build/ahead.log 2>&1 & }

# Without crates that have no programs. They would add features to dependencies. `bench` is built with the same features when it
# is run.
PROGRAMS := --workspace $(addprefix --exclude ferrovirt-,fuzz layout e2e-tests skips)
BINARIES := virt-api virt-controller virt-handler virt-launcher virt-launcher-monitor virt-importer kubectl-virt cluster csi-driver \
	stories images crds hanging-mount hostile-launcher image-server
# `cluster deps` installs further dependencies (e2e/cluster/src/deps.rs lists them with their purposes).
# `kubectl virt version` prints the commit. No other program contains it: it would be compiled again with each commit.
COMMIT = $(if $(wildcard .git),FERROVIRT_GIT_COMMIT=$(shell git rev-parse --verify HEAD) \
	FERROVIRT_GIT_TREE_STATE=$(if $(shell git status --porcelain),dirty,clean))
.PHONY: build
build: ahead ## Builds all programs (release profile) and puts those for users into build/bin
	$(COMMIT) $(CARGO) build --release --locked $(PROGRAMS) $(addprefix --bin ,$(BINARIES))
	install -D -t $(BIN) $(RELEASE)/kubectl-virt $(RELEASE)/cluster $(RELEASE)/csi-driver $(RELEASE)/images
	@ln -sf kubectl-virt $(BIN)/$(COMPLETER)
	$(CLUSTER) deps

.PHONY: components
components: build ## Builds Kubernetes and the rest of the test cluster from their Go module, once
	@$(AWAIT_AHEAD)
	$(CLUSTER) build-components

.PHONY: images
images: build ## Builds the images of all processes into build/images
	$(IMAGES) build services

.PHONY: debug-image
debug-image: images ## Builds the launcher images with a shell and tools (see launcherPods.debug of the chart) and for guests of arm64
	$(IMAGES) build virt-launcher-debug virt-launcher-arm64

.PHONY: guests
guests: build ## Builds the images of all test guests into build/images
	$(IMAGES) build guests

.PHONY: tiny
tiny: images
	$(IMAGES) build guest-tiny guest-tiny-kernel
	@$(AWAIT_AHEAD)

.PHONY: domains
domains: build ## Checks recorded domain XML with the libvirt of the launcher image
	$(IMAGES) check-domains launcher/src/domain/recorded/*.xml

.PHONY: up
up: tiny ## Brings a cluster up (or uses that of KUBECONFIG), installs Ferrovirt and starts a VM; NODES=1 or KUBERNETES=1.35 select nodes and version
	$(CLUSTER) demo $(addprefix --kubernetes ,$(KUBERNETES)) $(if $(filter command environment,$(firstword $(origin NODES))),--nodes $(NODES))

# If it was not built, or cleaned.
$(CLUSTER):
	$(CARGO) build --release --locked $(PROGRAMS) --bin cluster

.PHONY: down
down: $(CLUSTER) ## Removes the cluster and everything it created
	$(CLUSTER) down

.PHONY: status
status: $(CLUSTER) ## Shows the status of the cluster
	$(CLUSTER) status

DENY_VERSION := 0.20.2
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ferrovirt/tools
DENY := $(TOOLS)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny
# Not optimized: that takes a quarter of the time, and a check takes two seconds.
$(DENY):
	env -u CARGO_TARGET_DIR CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=256 \
	CARGO_PROFILE_RELEASE_DEBUG=false $(CARGO) install --quiet --locked --root $(TOOLS)/cargo-deny-$(DENY_VERSION) \
	cargo-deny --version $(DENY_VERSION)

# Seconds for fetching the database of advisories, which is on GitHub.
ADVISORIES_LIMIT := 20
.PHONY: lint
lint: $(DENY) ## Checks format, clippy, the dependency tree and the chart
	$(CARGO) fmt --all --check
	@# Fetched while clippy runs.
	@timeout $(ADVISORIES_LIMIT) $(DENY) fetch db 2>/dev/null & fetched=$$!; \
	set -x; $(CARGO) clippy --workspace --all-targets --locked -- -D warnings || exit; \
	$(DENY) --log-level error check bans licenses sources || exit; \
	{ set +x; } 2>/dev/null; \
	if wait $$fetched; then $(DENY) --offline --log-level error check advisories; \
	else echo 'ADVISORIES NOT CHECKED: the database of RustSec could not be fetched from GitHub'; fi
	$(CARGO) build --release --locked $(PROGRAMS) --bin cluster
	@# Otherwise the Go packages of Helm are compiled twice at once.
	@$(AWAIT_AHEAD)
	$(CLUSTER) check-chart

.PHONY: rules
rules: ## Checks and tests the chart's alerts with promtool (builds it once, several minutes)
	$(CARGO) build --release --locked $(PROGRAMS) --bin cluster
	$(CLUSTER) check-rules

.PHONY: docs
docs: ## Renews the generated parts of the documents
	RENEW=1 $(CARGO) test --locked -p ferrovirt-layout

.PHONY: unit
unit: ## Runs unit tests
	$(CARGO) test --workspace --exclude ferrovirt-e2e-tests --locked

# Version of Kubernetes of the test cluster: 1.35, 1.36 or 1.37.
KUBERNETES :=
# Nodes of the test cluster. Stories of migrations need two. `make up` has two if the memory suffices, unless NODES is set.
NODES ?= 2
# Selected from the workspace: for a single package cargo would rebuild dependencies with fewer features.
export TESTS := $(CARGO) test --workspace --locked
export SELECTOR := $(RELEASE)/stories
# Parts of names of stories.
STORY :=
# A revision: stories that test what changed since.
CHANGED :=
# If not empty, metrics-server is built, once in half a minute, for the story about load.
METRICS :=
# If not empty, e2e/story-times.tsv gets the durations of the stories.
RENEW_TIMES = $(RENEW)
SELECTION = $(if $(CHANGED),--changed $(CHANGED),$(STORY))
.PHONY: e2e
e2e: images debug-image guests ## Runs stories (end-to-end tests) on the test cluster or on that of KUBECONFIG: all, STORY=name, or CHANGED=revision
	$(TESTS) --test conformance --test e2e --test audit --no-run
	$(TESTS) --test e2e -- --list | $(SELECTOR) select $(SELECTION)
	@$(AWAIT_AHEAD)
	! test -s build/stories-selected || { $(if $(METRICS),METRICS_SERVER=$$($(CLUSTER) build-metrics-server) && export METRICS_SERVER && )\
	$(CLUSTER) run $(addprefix --kubernetes ,$(KUBERNETES)) --nodes $(NODES) -- env RENEW=$(RENEW_TIMES) e2e/run.sh; }

# Versions of Kubernetes other than the default. Each is built once, from a module of its own that `ahead` leaves alone.
OTHER_VERSIONS := 1.35 1.37
.PHONY: versions
versions: images debug-image guests ## Runs a selection of stories on Kubernetes 1.35 and 1.37, and one without image volumes (builds each version once, 6 minutes)
	$(TESTS) --test conformance --test e2e --test audit --no-run
	@$(AWAIT_AHEAD)
	@! $(CLUSTER) status >/dev/null 2>&1 || { echo 'versions: needs fresh clusters, and one is up: run make down' >&2; exit 1; }
	for version in $(OTHER_VERSIONS); do \
	env -u KUBECONFIG $(CLUSTER) run --kubernetes $$version --nodes $(NODES) -- e2e/versions.sh || exit; done
	env -u KUBECONFIG IMAGE_VOLUMES=off $(CLUSTER) run --kubernetes 1.35 --feature-gates ImageVolume=false -- e2e/versions.sh

# Stories on a node in a VM, for `make node-test` all of e2e/vm-node-stories.txt.
NODE_STORIES :=
RUN_NODE = env -u KUBECONFIG $(CLUSTER) run $(DUAL_STACK) --vm-node -- e2e/node.sh $(NODE_STORIES)
.PHONY: node-test
# A cluster that is up keeps its address families.
node-test: DUAL_STACK = $(shell $(CLUSTER) status >/dev/null 2>&1 || echo --dual-stack)
node-test: images guests ## Runs stories on a node in a VM with systemd, cgroup v2 and Debian's kernel, about 30 minutes (NODE_STORIES=names)
	$(TESTS) --test e2e --no-run
	@$(AWAIT_AHEAD)
	$(RUN_NODE)

# One of these stories, which starts a VM and plugs a disk, on every tenth commit by its hash.
.PHONY: node-smoke
node-smoke: NODE_STORIES := vm_node::plugged_disk_is_granted_again_after_a_rewrite_of_device_rules
node-smoke: images guests
	@commit=$$(git rev-parse HEAD 2>/dev/null | cut -c 1-7); \
	if test $$((0x$${commit:-1} % 10)) != 0; then echo 'node-smoke: runs on every tenth commit'; exit; fi; \
	set -x; $(RUN_NODE)

EVERYTHING := ahead lint unit domains e2e
.PHONY: test
test: SELECTION = --share
test: $(EVERYTHING) node-smoke ## Runs lint, unit tests, cluster up, core stories and a share of the others, cluster down

.PHONY: test-all
test-all: RENEW_TIMES = 1
test-all: METRICS = 1
test-all: $(EVERYTHING) ## Runs test with all stories, and renews e2e/story-times.tsv

.PHONY: test-long
test-long: export FLOOD_SECONDS = 120
test-long: export FUZZ_SECONDS = 60
test-long: export KILLS = all
test-long: METRICS = 1
test-long: $(EVERYTHING) csi-sanity rules release-test upgrade-test moving-test guides-test versions node-test ## Runs test-all with all rows of the tables of kills, long attacks, more fuzzing, and csi-sanity, rules, release-test, upgrade-test, moving-test, guides-test, versions and node-test

# Builds the benchmark.
.PHONY: benchmark
benchmark: tiny debug-image
	$(CARGO) build --release --locked $(PROGRAMS) --bin bench
	install -D -t $(BIN) $(RELEASE)/bench

.PHONY: bench
bench: NODES := 1
bench: benchmark ## Measures starts, memory and API calls; writes build/bench.json
	$(CLUSTER) run --nodes $(NODES) -- $(RELEASE)/bench

.PHONY: bench-scale
bench-scale: benchmark ## Measures many VMs on simulated nodes (about ten minutes; SCALE has sizes); writes build/bench-scale.json
	kwok=$$($(CLUSTER) build-kwok) && $(CLUSTER) run -- $(RELEASE)/bench --scale "$$kwok" $(SCALE)

.PHONY: trace-picture
trace-picture: images guests ## Draws a real start of a VM into docs/images/start.svg
	$(TESTS) --test e2e --no-run
	@$(AWAIT_AHEAD)
	$(CLUSTER) run -- env TRACE_PICTURE=docs/images/start.svg $(TESTS) --test e2e -- traces:: --nocapture

.PHONY: console-picture
console-picture: images guests ## Takes the picture of a real web console into docs/images/web-console.png (needs chromium)
	$(TESTS) --test e2e --no-run
	@$(AWAIT_AHEAD)
	$(CLUSTER) run -- env CONSOLE_PICTURE=docs/images/web-console.png $(TESTS) --test e2e -- web_console:: --nocapture

.PHONY: csi-sanity
csi-sanity: build ## Tests the storage driver of the test cluster with csi-sanity (builds it once, half a minute)
	sanity=$$($(CLUSTER) build-csi-sanity) && DRIVER=$(RELEASE)/csi-driver SANITY="$$sanity" e2e/csi/sanity.sh

.PHONY: clients
clients: tiny ## Tests clients of other projects: Python, TypeScript, promtool, VNC (see e2e/clients)
	$(IMAGES) build guest-debian
	promtool=$$($(CLUSTER) build-promtool) && $(CLUSTER) run --nodes $(NODES) -- env PROMTOOL="$$promtool" e2e/clients/run.sh

.PHONY: push
push: ## Pushes the images to REGISTRY=host/path with skopeo
	@test -n "$(REGISTRY)" || { echo 'REGISTRY=host/path is not set' >&2; exit 1; }
	$(IMAGES) push --registry $(REGISTRY) $(PUSH_FLAGS)

# VERSION is by default the appVersion of the chart, FORMER the packaged chart of the release before.
.PHONY: release
release: NO_CLUSTER := yes
release: images debug-image ## Pushes images and chart to REGISTRY=host/path; writes build/release
	@test -n "$(REGISTRY)" || { echo 'REGISTRY=host/path is not set' >&2; exit 1; }
	@command -v skopeo >/dev/null || apt-get install -q -y --no-install-recommends skopeo
	helm=$$($(CLUSTER) build-helm) && $(IMAGES) release --registry $(REGISTRY) --helm "$$helm" $(addprefix --version ,$(VERSION)) \
	$(addprefix --former ,$(FORMER)) $(PUSH_FLAGS)

.PHONY: release-test
release-test: images debug-image ## Releases to a local registry, and installs from it by Helm and by manifests
	$(IMAGES) build guest-tiny
	@command -v skopeo >/dev/null || apt-get install -q -y --no-install-recommends skopeo
	@$(AWAIT_AHEAD)
	CLUSTER=$(CLUSTER) IMAGES=$(IMAGES) e2e/release/run.sh

.PHONY: moving-test
moving-test: images ## Moves a cluster with KubeVirt's objects to Ferrovirt and back (see e2e/moving)
	$(IMAGES) build guest-tiny
	@$(AWAIT_AHEAD)
	CLUSTER=$(CLUSTER) e2e/moving/run.sh

.PHONY: guides-test
guides-test: images ## Executes the commands of the guides on a fresh cluster (see e2e/guides)
	$(IMAGES) build guest-tiny guest-debian
	@$(AWAIT_AHEAD)
	CLUSTER=$(CLUSTER) e2e/guides/run.sh

.PHONY: upgrade-test
upgrade-test: images ## Upgrades a cluster with ten VMs from the former release (builds it once), and back, and uninstalls it
	$(IMAGES) build guest-tiny
	@$(AWAIT_AHEAD)
	CLUSTER=$(CLUSTER) e2e/upgrade/run.sh

.PHONY: install-cli
install-cli: build ## Installs the kubectl plugin into PREFIX/bin (/usr/local)
	install -D -t $(PREFIX)/bin $(BIN)/kubectl-virt
	ln -sf kubectl-virt $(PREFIX)/bin/$(COMPLETER)

.PHONY: clean
clean: ## Removes the cluster and build/; compiled crates and components stay in the cache
	@if [ -x $(CLUSTER) ]; then $(CLUSTER) down; fi
	rm -rf build

.PHONY: findings
findings: ## Checks the behaviour of other software that findings/ describes (downloads packages)
	@status=0; for script in findings/*.sh; do echo "$$script"; "$$script" || { echo "$$script: status $$?" >&2; status=1; }; done; exit $$status
