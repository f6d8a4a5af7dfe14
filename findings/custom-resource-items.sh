#!/bin/sh
# Version: k8s.io/apimachinery 0.36.3.
# Expected: a custom resource with a field "items" beside "metadata" is an object like any other for the dynamic decoder; a list is
# told by its kind, which ends in List.
# Seen: any object with a top-level "items" is decoded as a list, whatever its kind is. A list of objects comes back changed: each
# item gets apiVersion and kind of the object around it. null comes back as []. A map or a list of texts is an error. The
# same bytes read into an Unstructured are accepted.
# Consequence: dynamic clients and tools fail on such a resource or write fields that nobody set. "items" is no name for a top-level
# field of a custom resource, although its definition is accepted.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get k8s.io/apimachinery@v0.36.3 2>/dev/null || exit 3
cat >main.go <<'EOF'
package main

import (
	"fmt"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	for items, seen := range map[string]string{
		`[{"name":"a"}]`: `"items":[{"apiVersion":"example.com/v1","kind":"Basket","name":"a"}]`,
		`null`:           `"items":[]`,
		`["a"]`:          "",
		`{"a":1}`:        "",
	} {
		text := []byte(`{"apiVersion":"example.com/v1","kind":"Basket","metadata":{"name":"b"},"items":` + items + `}`)
		object, _, err := unstructured.UnstructuredJSONScheme.Decode(text, nil, nil)
		var written []byte
		if list, ok := object.(*unstructured.UnstructuredList); ok && err == nil {
			written, _ = list.MarshalJSON()
		}
		fmt.Printf("%s: %T %v %s\n", items, object, err, strings.TrimSpace(string(written)))
		plain := (&unstructured.Unstructured{}).UnmarshalJSON(text)
		if plain != nil || (err != nil) != (seen == "") || !strings.Contains(string(written), seen) {
			os.Exit(1)
		}
	}
}
EOF
go mod tidy 2>/dev/null || exit 3
go build -o finding . && ./finding
