# SPDX-License-Identifier: Apache-2.0
"""The training step, its state, and what both are made of."""
