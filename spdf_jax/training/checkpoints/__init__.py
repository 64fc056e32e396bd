# SPDX-License-Identifier: Apache-2.0
"""Writes, finds and restores checkpoints, and keeps working directories."""
