# SPDX-License-Identifier: Apache-2.0
"""The config: its types, its checks, and the phases it describes."""
