"""Export and loading of Estimators as compiled programs."""
