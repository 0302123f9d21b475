"""The Batching Lab: small scenarios through the production scheduler, as pictures of slots over time."""

from paceline_lab.assets import PAGE, asset
from paceline_lab.presets import PRESETS
from paceline_lab.scenario import Scenario
from paceline_lab.scene import scene_of

__all__ = ["PAGE", "PRESETS", "Scenario", "asset", "scene_of"]
