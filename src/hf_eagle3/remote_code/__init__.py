# SPDX-License-Identifier: Apache-2.0
"""What travels with every draft, and nothing else does: loading it and decoding with it, on torch and transformers."""
