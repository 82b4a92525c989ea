"""Base layer that every other package imports: errors, devices, seeds, trial states, state trees and small caches."""
