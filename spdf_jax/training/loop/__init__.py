# SPDX-License-Identifier: Apache-2.0
"""The training loop, its evaluations, and what it writes."""
