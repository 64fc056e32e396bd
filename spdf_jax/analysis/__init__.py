"""What a run cost and what it reached: FLOPs, finished runs, reports."""

from spdf_jax.analysis.change_plots import plot_mask_changes
from spdf_jax.analysis.curves import dense_flops_at
from spdf_jax.analysis.curves import EqualFlops
from spdf_jax.analysis.curves import flops_at
from spdf_jax.analysis.curves import losses_at_equal_flops
from spdf_jax.analysis.curves import pretraining_curve
from spdf_jax.analysis.figures import write_figures
from spdf_jax.analysis.flops import effective_sparsity
from spdf_jax.analysis.flops import forward_flops
from spdf_jax.analysis.flops import ModelShape
from spdf_jax.analysis.flops import shape_of
from spdf_jax.analysis.flops import training_flops
from spdf_jax.analysis.mask_plots import plot_masks
from spdf_jax.analysis.plots import plot_layer_sparsity
from spdf_jax.analysis.plots import plot_loss_over_flops
from spdf_jax.analysis.plots import plot_loss_over_steps
from spdf_jax.analysis.report import write_report
from spdf_jax.analysis.segments import Segment
from spdf_jax.analysis.simulation import simulate_inference
from spdf_jax.analysis.simulation import simulate_recipe
from spdf_jax.analysis.simulation_text import format_estimate
from spdf_jax.analysis.subspaces import cosine_distances
from spdf_jax.analysis.wafer_memory import advise_batch
from spdf_jax.analysis.wafer_plots import plot_appendix_c
from spdf_jax.analysis.wafer_plots import plot_roofline
from spdf_jax.analysis.workdirs import PhaseRecord
from spdf_jax.analysis.workdirs import read_run
from spdf_jax.analysis.workdirs import Run

__all__ = [
    'EqualFlops',
    'ModelShape',
    'PhaseRecord',
    'Run',
    'Segment',
    'advise_batch',
    'cosine_distances',
    'dense_flops_at',
    'effective_sparsity',
    'flops_at',
    'format_estimate',
    'forward_flops',
    'losses_at_equal_flops',
    'plot_appendix_c',
    'plot_layer_sparsity',
    'plot_loss_over_flops',
    'plot_loss_over_steps',
    'plot_mask_changes',
    'plot_masks',
    'plot_roofline',
    'pretraining_curve',
    'read_run',
    'shape_of',
    'simulate_inference',
    'simulate_recipe',
    'training_flops',
    'write_figures',
    'write_report',
]
