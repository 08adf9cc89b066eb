"""Engines that are started one after the other over one SSD folder."""

from __future__ import annotations

from pathlib import Path

from mlx_cb.config import EngineConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.model.loader import LoadedModel


class OneFolder:
    """Each engine is closed when the next is started, or at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core: EngineCore | None = None

    def begin(self, config: EngineConfig, loaded: LoadedModel) -> EngineCore:
        """A new engine, as after a restart."""
        self.stop()
        self.core = EngineCore(config, loaded)
        return self.core

    def stop(self) -> None:
        """Close the running engine; everything is written then."""
        if self.core is not None:
            self.core.close(patience=30)
            self.core = None
