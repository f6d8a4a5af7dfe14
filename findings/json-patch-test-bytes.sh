#!/bin/sh
# Version: gopkg.in/evanphx/json-patch.v4 4.13.0, which the API server of Kubernetes 1.36 uses.
# Expected: the operation "test" compares values, as RFC 6902 asks: spellings of one text or number are equal, a member that is null
# differs from a missing member, and "replace" of a missing member fails.
# Seen: texts and numbers are compared byte by byte. The API server's document is written by Go's JSON encoder, which escapes <, >
# and &, so that a test with the text "a && b" fails unless the client escapes it as well; most encoders outside Go do not. Keys of
# objects may have any order. A test with null passes on a missing member, "replace" of a missing member adds it, and the index -1 is
# the last element.
# Consequence: clients not written in Go escape these three characters (and U+2028, U+2029) in JSON patches with tests.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get gopkg.in/evanphx/json-patch.v4@v4.13.0 2>/dev/null || exit 3
cat >main.go <<'GO'
package main

import (
	"encoding/json"
	"fmt"
	"os"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
)

func main() {
	written, _ := json.Marshal(map[string]any{"script": "a && b", "number": 100, "map": map[string]int{"x": 1, "y": 2}, "list": []int{1, 2}})
	fmt.Println(string(written))
	for patch, seen := range map[string]bool{
		`[{"op":"test","path":"/script","value":"a && b"}]`:             false,
		`[{"op":"test","path":"/script","value":"a \u0026\u0026 b"}]`:   true,
		`[{"op":"test","path":"/number","value":1e2}]`:                  false,
		`[{"op":"test","path":"/map","value":{"y":2,"x":1}}]`:           true,
		`[{"op":"test","path":"/missing","value":null}]`:                true,
		`[{"op":"test","path":"/map","value":{"x":1,"y":2,"z":null}}]`:  false,
		`[{"op":"replace","path":"/missing","value":3}]`:                true,
		`[{"op":"test","path":"/list/-1","value":2}]`:                   true,
		`[{"op":"remove","path":"/missing"}]`:                           false,
	} {
		decoded, err := jsonpatch.DecodePatch([]byte(patch))
		if err == nil {
			_, err = decoded.Apply(written)
		}
		fmt.Println(patch, err)
		if (err == nil) != seen {
			os.Exit(1)
		}
	}
}
GO
go mod tidy 2>/dev/null || exit 3
go build -o finding . && ./finding
