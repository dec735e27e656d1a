"""What travels between the deployments, and how streams of outputs are routed."""
