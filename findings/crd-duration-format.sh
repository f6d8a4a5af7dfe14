#!/bin/sh
# Version: k8s.io/apimachinery 0.36.3 and k8s.io/kube-openapi of 2026-03-17, which checks formats in schemas of custom resources.
# Expected: a field with "format: duration" accepts what metav1.Duration, the type that controllers read it with, accepts; a sign, a
# fraction or other text around the number is either understood or refused.
# Seen: a text that Go's parser refuses is searched for pairs of number and unit, and everything else in it is ignored: 1.5d are
# five days, -2d are plus two days, PT5s (ISO 8601) and "x 5 s y" are five seconds. metav1.Duration refuses all of these.
# Consequence: the API server stores objects that no controller in Go can decode, and the format reads other values than written.
# A field for a duration needs a pattern, not this format.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get k8s.io/apimachinery@v0.36.3 k8s.io/kube-openapi@v0.0.0-20260317180543-43fb72c5454a 2>/dev/null || exit 3
cat >main.go <<'EOF'
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-openapi/pkg/validation/strfmt"
)

func main() {
	day := 24 * time.Hour
	for text, seen := range map[string]time.Duration{"1.5d": 5 * day, "-2d": 2 * day, "PT5s": 5 * time.Second, "x 5 s y": 5 * time.Second} {
		value, err := strfmt.ParseDuration(text)
		valid := strfmt.Default.Validates("duration", text)
		quoted, _ := json.Marshal(text)
		refused := json.Unmarshal(quoted, &metav1.Duration{})
		fmt.Printf("%q: format %v %v, metav1.Duration: %v\n", text, valid, value, refused)
		if err != nil || !valid || value != seen || refused == nil {
			os.Exit(1)
		}
	}
}
EOF
go mod tidy 2>/dev/null || exit 3
go build -o finding . && ./finding
