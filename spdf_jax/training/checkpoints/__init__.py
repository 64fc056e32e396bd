# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and working directories: written, found, restored."""
