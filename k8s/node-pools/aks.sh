#!/bin/sh
# A spot pool on AKS: label and taint kubernetes.azure.com/scalesetpriority=spot, set by AKS itself, and
# 30 s of notice. Set the chart's jobs.provider to aks.
#
#   GROUP=ml CLUSTER=training k8s/node-pools/aks.sh
set -eu
: "${GROUP:?name the resource group: GROUP=ml}" "${CLUSTER:?name the cluster: CLUSTER=training}"
exec az aks nodepool add --resource-group "$GROUP" --cluster-name "$CLUSTER" --name spotgpus \
  --priority Spot --eviction-policy Delete --spot-max-price -1 \
  --node-vm-size Standard_NC96ads_A100_v4 --node-taints nvidia.com/gpu=true:NoSchedule \
  --enable-cluster-autoscaler --min-count 0 --max-count 8 --node-count 0
