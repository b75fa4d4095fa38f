# SPDX-License-Identifier: Apache-2.0
"""Loading a draft and decoding with it, on torch and transformers: this code travels with every draft."""
