"""What is known of vLLM, and the only place that knows it: rules per version as data, without importing the engine."""
