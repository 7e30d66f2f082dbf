"""Graph rewriting: find expert blocks in an FX graph, prove what they compute, replace them by one operator."""
