"""Small programs that tests of the modeled wafer share."""

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.costs import ModelShape

DEVICE = create_device('cs2')
GPT3_XL = ModelShape(24, 2048, 16, 8192, 50257)
TOKENS, WIDTH, LAYERS = 512, 64, 10
X = jax.ShapeDtypeStruct((8, TOKENS // 8, WIDTH), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
WS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
MASKS = np.random.default_rng(0).random((LAYERS, WIDTH, WIDTH)) < 0.25


def layer(x, w):
  return jax.nn.relu(x @ w)


def scanned(x, ws):
  return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


def scanned_sparse(x, ws, masks):
  step = lambda x, w: (jax.nn.relu(sparse_matmul(x, *w)), None)
  return jax.lax.scan(step, x, (ws, masks))[0]


def products(report):
  return [r for r in report.rows if isinstance(r.operation.work, Product)]


def product_flops(report):
  return sum(row.cost.flops for row in products(report))
