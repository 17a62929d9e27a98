from decoder.plugins.mlx_lm.mlx_drafts import DraftsForMlx as DraftsForMlx
