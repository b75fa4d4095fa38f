# SPDX-License-Identifier: Apache-2.0
"""Loading a draft and decoding with it. These files ship with every draft and need only torch and transformers."""
