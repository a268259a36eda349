#!/bin/sh
# A spot pool on GKE: label cloud.google.com/gke-spot=true, the taint below, and 30 s of notice of which
# pods get 15 s. Set the chart's jobs.provider to gke.
#
#   CLUSTER=training LOCATION=europe-west4 k8s/node-pools/gke.sh
set -eu
: "${CLUSTER:?name the cluster: CLUSTER=training}" "${LOCATION:?name its zone or region: LOCATION=europe-west4}"
exec gcloud container node-pools create spot-gpus \
  --cluster "$CLUSTER" --location "$LOCATION" \
  --spot --machine-type g2-standard-48 --accelerator type=nvidia-l4,count=4,gpu-driver-version=default \
  --num-nodes 0 --enable-autoscaling --min-nodes 0 --max-nodes 8 \
  --node-taints cloud.google.com/gke-spot=true:NoSchedule
