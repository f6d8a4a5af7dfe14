#!/bin/sh
# Version: k8s.io/apiextensions-apiserver and k8s.io/apimachinery 0.36.3, the Rust crate serde_json 1.0.150.
# Expected: an update that changes nothing keeps generation and resourceVersion of a custom resource, whatever JSON the client writes
# for the same value; 2 and 2.0 are one number in JSON (and in JSON schema), and both are stored as 2.
# Seen: the API server decodes 2 as an integer and 2.0 as a float and takes them for different. serde_json writes a whole f64 as 2.0
# (as Python does), Go writes and stores 2. So each merge patch, JSON patch or update from Rust of a field of type number with a whole
# value increments the generation and is written, although the stored spec stays the same byte by byte. Server-side apply compares
# by value and is not affected, nor is a value with a fraction.
# Consequence: a controller that writes such a field on each reconcile is woken by its own write and never settles, and what observes the
# generation starts over. Use server-side apply, compare before the write, or choose an integer or a quantity.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p crate/src
cat >crate/Cargo.toml <<'TOML'
[package]
name = "finding"
version = "0.0.0"
edition = "2024"
[dependencies]
serde_json = "=1.0.150"
TOML
cat >crate/src/main.rs <<'RUST'
fn main() {
    for ratio in [2.0_f64, 2.5] {
        println!("{}", serde_json::json!({"spec": {"ratio": ratio}}));
    }
}
RUST
cargo build --quiet --manifest-path crate/Cargo.toml --target-dir crate/target || exit 3
crate/target/debug/finding >patches
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get k8s.io/apimachinery@v0.36.3 gopkg.in/evanphx/json-patch.v4@v4.13.0 2>/dev/null || exit 3
# The strategy of custom resources needs a thousand packages to compile, its two functions that set the generation need one.
source=$(go mod download -json k8s.io/apiextensions-apiserver@v0.36.3 | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
strategy=$source/pkg/registry/customresource/strategy.go
[ -f "$strategy" ] || exit 3
cat >strategy.go <<'GO'
package main

import (
	"context"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

type customResourceStrategy struct{ status *struct{} }

GO
sed -n '/^func (a customResourceStrategy) PrepareForUpdate(/,/^}/p; /^func copyNonMetadata(/,/^}/p' "$strategy" >>strategy.go
cat >main.go <<'GO'
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/structured-merge-diff/v6/value"
)

func must[T any](result T, err error) T {
	if err != nil {
		panic(err)
	}
	return result
}

func read(text []byte) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	if err := object.UnmarshalJSON(text); err != nil {
		panic(err)
	}
	return object
}

// patched returns the generation and the stored spec after the same merge patch was sent three times.
func patched(patch string, ratio float64) (int64, string) {
	stored := must(read(fmt.Appendf(nil, `{"apiVersion": "example.com/v1", "kind": "Gate",
		"metadata": {"name": "a", "generation": 1}, "spec": {"ratio": %v}}`, ratio)).MarshalJSON())
	for range 3 {
		object := read(must(jsonpatch.MergePatch(stored, []byte(patch))))
		customResourceStrategy{}.PrepareForUpdate(context.Background(), object, read(stored))
		stored = must(object.MarshalJSON())
	}
	object := read(stored)
	return object.GetGeneration(), string(must(json.Marshal(object.Object["spec"])))
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	same := true
	for _, row := range []struct {
		ratio    float64
		fromRust int64
	}{{2, 4}, {2.5, 1}} {
		lines.Scan()
		fromRust := lines.Text()
		fromGo := string(must(json.Marshal(map[string]any{"spec": map[string]float64{"ratio": row.ratio}})))
		rust, inRust := patched(fromRust, row.ratio)
		goes, inGo := patched(fromGo, row.ratio)
		fmt.Printf("Rust sends %s: generation %d, stored %s\n", fromRust, rust, inRust)
		fmt.Printf("Go sends %s: generation %d, stored %s\n", fromGo, goes, inGo)
		same = same && rust == row.fromRust && goes == 1 && inRust == inGo
	}
	byValue := value.Equals(value.NewValueInterface(int64(2)), value.NewValueInterface(2.0))
	fmt.Printf("server-side apply: 2 equals 2.0: %v\n", byValue)
	if !same || !byValue {
		os.Exit(1)
	}
}
GO
go mod tidy 2>/dev/null || exit 3
go build -o finding . || exit 1
echo "k8s.io/apiextensions-apiserver 0.36.3, serde_json 1.0.150"
./finding <patches
