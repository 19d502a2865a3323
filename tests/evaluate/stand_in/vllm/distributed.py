def cleanup_dist_env_and_memory():
    """Nothing is distributed here."""
