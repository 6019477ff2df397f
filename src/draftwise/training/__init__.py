"""What every training run needs: schedule, optimisers, packed data, and a resumable loop."""
