# SPDX-License-Identifier: Apache-2.0
"""The interpreter of `skip_zeros`: it follows weights to their products."""
