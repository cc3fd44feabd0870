package org.ondevice.app

import android.app.Activity
import android.os.Bundle
import android.widget.TextView

class MainActivity : Activity() {
    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        setContentView(TextView(this).apply { text = getString(R.string.app_name) + org.pytorch.executorch.EValue.from(1L).toInt() })
    }
}
