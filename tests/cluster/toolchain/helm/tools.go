//go:build tools

// Package tools pins the helm that lints, renders and installs the chart.
package tools

import (
	_ "helm.sh/helm/v3/cmd/helm"
)
