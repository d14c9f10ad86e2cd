import numpy
import torch


def nodes(num_nodes):
    x, w = numpy.polynomial.legendre.leggauss(num_nodes)
    return torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)


def sdmc(keep, t, w, noise):
    masked = (noise < t[:, None, None]) & keep
    return masked, (w / t)[:, None].expand(-1, len(keep))


def fixed_count(t, n):
    count = (1 + t[:, None] * (n - 1) + 0.5).floor().long()
    count = torch.minimum(count, n)
    return count, n.double() / count
