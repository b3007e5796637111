"""All cases, by name. Case modules import no package that is measured."""

from harness.case import Case

from cases import clouds, costs, dcp, device, formats, ranks, servers, tensors

ALL: dict[str, Case] = {
    case.name: case
    for module in (tensors, formats, servers, dcp, ranks, costs, clouds, device)
    for case in module.CASES
}
