// Command dns is CoreDNS with only the plugins a cluster's DNS needs: the stock plugin list triples build time and size.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
)

func init() {
	// The order plugins run in, a subset of CoreDNS's plugin.cfg.
	dnsserver.Directives = []string{"reload", "errors", "health", "ready", "cache", "kubernetes", "loop", "forward"}
}

func main() { coremain.Run() }
