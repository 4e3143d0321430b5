"""Static checks of a checkpoint folder: no GPU and no engine, headers first, for results of any producer."""
