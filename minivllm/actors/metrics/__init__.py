"""The Metrics deployment: block counts, rejections and Prometheus text."""
