package org.ondevice.app

import android.Manifest
import android.app.Activity
import android.content.Intent
import android.content.pm.PackageManager
import android.content.res.ColorStateList
import android.os.Build
import android.os.Bundle
import android.view.Gravity
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.view.WindowInsets
import android.widget.FrameLayout
import android.widget.ImageView
import android.widget.LinearLayout

/** The app's one window: six screens and the bar that switches between them. */
class MainActivity : Activity() {
    private class Tab(val id: Int, val label: Int, val icon: Int, val screen: Screen)

    private lateinit var ui: Ui
    private lateinit var tabs: List<Tab>
    private lateinit var content: FrameLayout
    private val buttons = ArrayList<View>()
    private var current = -1

    val screen: Screen get() = tabs[current].screen

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        ui = Ui(this)
        tabs = listOf(
            Tab(R.id.tab_models, R.string.tab_models, R.drawable.tab_models, ModelsScreen(this)),
            Tab(R.id.tab_data, R.string.tab_data, R.drawable.tab_data, DataScreen(this)),
            Tab(R.id.tab_train, R.string.tab_train, R.drawable.tab_train, TrainScreen(this)),
            Tab(R.id.tab_try, R.string.tab_try, R.drawable.tab_try, TryScreen(this)),
            Tab(R.id.tab_adapters, R.string.tab_adapters, R.drawable.tab_adapters, AdaptersScreen(this)),
            Tab(R.id.tab_fleet, R.string.tab_fleet, R.drawable.tab_fleet, FleetScreen(this)),
        )
        content = FrameLayout(this)
        val whole = LinearLayout(this).apply {
            orientation = LinearLayout.VERTICAL
            addView(content, LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f))
            addView(View(context).apply { setBackgroundColor(ui.color(R.color.outline)) }, LinearLayout.LayoutParams(MATCH_PARENT, ui.dp(1)))
            addView(bar(), LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT))
        }
        whole.setOnApplyWindowInsetsListener { view, insets -> keepClear(view, insets) }
        setContentView(whole)
        state?.let { saved -> tabs.forEach { tab -> saved.getBundle("screen_${tab.label}")?.let(tab.screen::restore) } }
        open(state?.getInt(TAB)?.coerceIn(tabs.indices) ?: Given.tab(intent, 0, tabs.indices))
        if (state == null) receive(intent)
        goOn()
    }

    override fun onNewIntent(intent: Intent) {
        super.onNewIntent(intent)
        open(Given.tab(intent, current, tabs.indices))
        receive(intent)
        goOn()
    }

    /** A fleet's file that another app shares or opens; it is shown, and nothing is done before the user asks for it. */
    private fun receive(intent: Intent) {
        val uri = Given.document(intent) ?: return
        open(FLEET)
        (screen as FleetScreen).receive(uri)
    }

    /** A run whose process was killed goes on when the user comes back, if the system has not started it before. */
    private fun goOn() {
        val app = application as OndeviceApp
        if (app.runs.live == null && app.wanted.read() != null) startForegroundService(TrainService.intent(this))
    }

    /** Android 15 draws apps below the system's bars; nothing of ours is put there. */
    private fun keepClear(view: View, insets: WindowInsets): WindowInsets {
        @Suppress("DEPRECATION")
        view.setPadding(insets.systemWindowInsetLeft, insets.systemWindowInsetTop, insets.systemWindowInsetRight, insets.systemWindowInsetBottom)
        return insets
    }

    private fun bar(): LinearLayout = LinearLayout(this).apply {
        orientation = LinearLayout.HORIZONTAL
        setBackgroundColor(ui.color(R.color.surface))
        for ((index, tab) in tabs.withIndex()) {
            val icon = ImageView(context).apply {
                setImageResource(tab.icon)
                importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_NO
            }
            val label = ui.text(getString(tab.label), 12f, bold = true).apply {
                gravity = Gravity.CENTER
                textAlignment = View.TEXT_ALIGNMENT_CENTER
                maxLines = 1
            }
            val button = LinearLayout(context).apply {
                id = tab.id
                orientation = LinearLayout.VERTICAL
                gravity = Gravity.CENTER
                isClickable = true
                isFocusable = true
                contentDescription = getString(tab.label)
                minimumHeight = ui.dp(60)
                background = ui.ripple(ui.shape(R.color.surface, 0))
                addView(icon, LinearLayout.LayoutParams(ui.dp(48), ui.dp(28)))
                addView(label)
                setOnClickListener { open(index) }
            }
            icon.setPadding(0, ui.dp(2), 0, ui.dp(2))
            buttons.add(button)
            addView(button, LinearLayout.LayoutParams(0, WRAP_CONTENT, 1f))
        }
    }

    /** Bring a tab to the front. */
    fun open(index: Int) {
        if (index == current) return
        if (current >= 0) tabs[current].screen.onHide()
        current = index
        content.removeAllViews()
        content.addView(screen.root)
        screen.render()
        screen.onShow()
        for ((at, button) in buttons.withIndex()) {
            button as LinearLayout
            val chosen = at == index
            button.isSelected = chosen
            val ink = ui.color(if (chosen) R.color.accent else R.color.text_soft)
            (button.getChildAt(0) as ImageView).imageTintList = ColorStateList.valueOf(ink)
            button.getChildAt(0).background = if (chosen) ui.shape(R.color.accent_soft, 14) else null
            (button.getChildAt(1) as android.widget.TextView).setTextColor(ink)
        }
        title = getString(tabs[index].label)
    }

    fun openTrain() = open(2)

    override fun onSaveInstanceState(state: Bundle) {
        super.onSaveInstanceState(state)
        state.putInt(TAB, current)
        for (tab in tabs) state.putBundle("screen_${tab.label}", Bundle().also(tab.screen::save))
    }

    override fun onDestroy() {
        if (current >= 0) screen.onHide()
        super.onDestroy()
    }

    /** Ask the system's picker for a file or a folder; the answer goes to the screen that asked. */
    fun pick(intent: Intent, request: Int) {
        startActivityForResult(intent, current * REQUESTS + request)
    }

    @Deprecated("the framework's own way of an answer; the newer one is in androidx")
    override fun onActivityResult(request: Int, result: Int, data: Intent?) {
        @Suppress("DEPRECATION")
        super.onActivityResult(request, result, data)
        val index = request / REQUESTS
        if (result != RESULT_OK || data == null || index !in tabs.indices) return
        open(index)
        Given.picked(data)?.let { screen.onPicked(request % REQUESTS, it) }
    }

    /** From Android 13 on a notification needs a permission; training works without it, only less visibly. */
    fun askToNotify() {
        if (Build.VERSION.SDK_INT < 33) return
        if (checkSelfPermission(Manifest.permission.POST_NOTIFICATIONS) == PackageManager.PERMISSION_GRANTED) return
        requestPermissions(arrayOf(Manifest.permission.POST_NOTIFICATIONS), 0)
    }

    companion object {
        const val FLEET = 5
        const val TAB = "org.ondevice.app.TAB"
        private const val REQUESTS = 16
    }
}
