"""Groups of processes that train one model and may come and go: islands (DiLoCo) and replicas."""
