//go:build tools

// Package tools pins what plays the nodes of a large cluster.
package tools

import (
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
